"""Request lengths that resemble conversations."""

import numpy as np


def sharegpt_like_lengths(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt lengths and output lengths of `count` requests.

    The lengths are log-normal with sigma 1 and the means 161 and 338, clipped to 4 to 1,024 tokens.
    """
    rng = np.random.RandomState(seed)

    def draw(mean: float) -> np.ndarray:
        drawn = rng.lognormal(np.log(mean) - 0.5, 1.0, count)
        return np.clip(drawn, 4, 1024).astype(int)

    return draw(161), draw(338)
