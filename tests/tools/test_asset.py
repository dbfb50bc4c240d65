"""Test the bundled model: size, parity with transformers and sample answers."""

import json
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.tiny.checkpoint import load_checkpoint
from tools.tiny.data import chat_document, dialogue_document, raw_document
from tools.tiny.dialogues import TASKS as DIALOGUES
from tools.tiny.dialogues import sample_dialogues
from tools.tiny.evaluate import exact
from tools.tiny.model import forward
from tools.tiny.tokenizer import EOS_TOKEN_IDS, build_tokenizer
from tools.tiny.world import TASKS, Example, sample_examples

FOLDER = Path(__file__).parents[2] / "jpaged" / "assets" / "tiny"


@pytest.fixture(scope="module")
def loaded():
    return load_checkpoint(FOLDER, jnp.dtype("float32"))


@pytest.fixture(scope="module")
def hf_model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_checkpoint_folder_of_the_bundled_model_is_small_and_complete(hf_model):
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 12e6
    assert (FOLDER / "MODEL_CARD.md").exists()
    assert type(hf_model).__name__ == "Qwen3ForCausalLM"
    assert hf_model.generation_config.eos_token_id == EOS_TOKEN_IDS
    assert json.loads((FOLDER / "config.json").read_text())["eos_token_id"] == EOS_TOKEN_IDS


def test_shipped_tokenizer_has_the_vocabulary_that_the_tool_builds():
    shipped = AutoTokenizer.from_pretrained(FOLDER)
    assert json.loads(shipped.backend_tokenizer.to_str())["model"]["merges"] == []
    assert shipped.get_vocab() == build_tokenizer().get_vocab()


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.full)])
def test_logits_of_the_training_model_match_transformers(loaded, hf_model, is_long):
    ids = list(sample_examples(0, 1, task="sort_numbers")[0].prompt.encode())[:32]
    if is_long:  # Fill the maximum context with chats that call tools.
        chats = sample_dialogues(0, 6, "calculator")
        ids = [i for chat in chats for i in dialogue_document(chat).ids][:1536]
        assert len(ids) == loaded[1].max_position_embeddings
    ids = np.array([ids])
    with torch.no_grad():
        expected = hf_model(torch.tensor(ids)).logits.numpy()
    params, config = loaded
    tokens = jnp.asarray(ids, jnp.int32)
    logits = forward(params, config, tokens, jnp.ones_like(tokens))
    np.testing.assert_allclose(np.asarray(logits), expected, rtol=1e-4, atol=1e-4)


def test_recorded_accuracy_of_every_task_is_at_least_99_percent():
    recorded = json.loads((FOLDER / "evaluation.json").read_text())["accuracy"]
    assert set(recorded) == {*TASKS, *DIALOGUES}
    assert min(share for forms in recorded.values() for share in forms.values()) >= 0.99


@pytest.mark.full
def test_model_answers_dialogues_correctly(loaded):
    tasks = [task for task in DIALOGUES for _ in range(8)]
    drawn = [each for task in DIALOGUES for each in sample_dialogues(5, 8, task)]
    params, config = loaded
    results = exact(params, config, [dialogue_document(each) for each in drawn])
    right = Counter(task for task, is_right in zip(tasks, results, strict=True) if is_right)
    assert min(right[task] for task in DIALOGUES) >= 7, right


@pytest.mark.full
def test_model_answers_short_tasks_correctly(loaded):
    numbers = ", ".join(map(str, range(1, 21)))
    examples = [Example("count", "Count from 1 to 20", numbers)]
    examples += [e for e in sample_examples(1, 30) if len(e.prompt) + len(e.answer) < 90]
    documents = [raw_document(e) for e in examples] + [chat_document([e]) for e in examples]
    params, config = loaded
    results = exact(params, config, [d for d in documents if len(d.ids) <= 128])
    assert results[0]
    assert sum(results) >= len(results) - 1
