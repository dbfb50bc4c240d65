"""Who tokenises what, when: short texts never wait for long ones."""

import asyncio
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from jpaged.serve.text_process import MIB, WORK, Done, Order, TextProcess

MAX_SHORT = 16 * 1024
"""Bytes of an order up to which it is for the lane of short ones: tens of milliseconds."""

_QUICK = 0.25
"""Seconds of the processor after which an order is not short, whatever its bytes are."""

_MAX_TRIES = 4
"""Of an order whose fork turns out to have ended before."""

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Done)
_PROBE = _encoder.encode(Order(token_ids=[]))


class TextPool:
    """Two forks of the text process, and what they have to do.

    One does short orders and gives up what turns out not to be short. The other does long ones, and
    short ones while there are none; both in the order of their arrival. An order that nobody waits
    for any more is dropped; the fork that works on it ends, and a new one takes its place.

    Args:
        process: The text process; it may be another pool's too.
        seconds: For one order.
    """

    def __init__(self, process: TextProcess, seconds: float):
        self._process, self._seconds = process, seconds
        self._short: deque[_Piece] = deque()
        self._long: deque[_Piece] = deque()
        self._changed = asyncio.Event()
        self._lanes = [asyncio.create_task(self._work(takes_long=it)) for it in (False, True)]

    async def do(self, order: Order) -> Done:
        """What comes of an order.

        Raises:
            OSError, RuntimeError, ValueError: there is no process for it.
        """
        data = _encoder.encode(order)
        answer = asyncio.get_running_loop().create_future()
        piece = _Piece(data, answer)
        (self._short if len(data) <= MAX_SHORT else self._long).append(piece)
        self._changed.set()
        return await answer

    def close(self) -> None:
        """End the forks and drop what is to be done."""
        for lane in self._lanes:
            lane.cancel()

    async def _work(self, *, takes_long: bool) -> None:
        fork: _Fork | None = None
        try:
            while True:
                piece = await self._next(takes_long=takes_long)
                try:
                    fork = fork or await _Fork.make(self._process, 0 if takes_long else _QUICK)
                    done = await fork.do(piece, self._seconds)
                except Exception as error:  # whatever it is, the lane goes on
                    is_lost = False
                    if fork is not None:
                        fork.end()
                        is_lost = isinstance(error, EOFError) and await fork.is_lost(self._seconds)
                        fork = None
                    self._give_up(piece, error, was_short=not takes_long, is_lost=is_lost)
                else:
                    if not piece.answer.done():
                        piece.answer.set_result(done)
        finally:
            if fork is not None:
                fork.end()

    async def _next(self, *, takes_long: bool) -> "_Piece":
        while True:
            while takes_long and self._long:
                if not (piece := self._long.popleft()).answer.done():
                    return piece
            while self._short:
                if not (piece := self._short.popleft()).answer.done():
                    return piece
            self._changed.clear()
            await self._changed.wait()

    def _give_up(
        self, piece: "_Piece", error: Exception, *, was_short: bool, is_lost: bool
    ) -> None:
        """Try again elsewhere, or say why not."""
        if piece.answer.done():
            return
        piece.num_tries += 1
        # The system ended a short order's fork: it is a long one. Or the fork was gone before it
        # had read the order, or went with the whole process: another one may do it.
        is_to_blame = not (is_lost or isinstance(error, ConnectionError))
        if (was_short and isinstance(error, EOFError)) or (
            not is_to_blame and piece.num_tries < _MAX_TRIES
        ):
            self._long.append(piece)
            self._changed.set()
            return
        if not is_to_blame:
            error = RuntimeError(f"the process that tokenises ended {piece.num_tries} times")
        if isinstance(error, TimeoutError):
            words = f"took longer than the limit of {self._seconds:g} seconds"
        elif isinstance(error, EOFError):  # what is not Python's ends when memory does
            most = self._process.settings.max_memory // MIB
            words = f"took more than the limit of {most} MiB of memory"
        else:
            piece.answer.set_exception(error)
            return
        piece.answer.set_result(Done(refused=f"{WORK} {words}: send less"))


@dataclass(eq=False)
class _Piece:
    """An order that waits or is worked on."""

    data: bytes
    answer: asyncio.Future[Done]
    num_tries: int = 0


class _Fork:
    """A fork of the text process, and the line to it."""

    def __init__(
        self,
        process: TextProcess,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ):
        self._process, self._number, self._seen = process, number, process.num_starts
        self._reader, self._writer = reader, writer

    @classmethod
    async def make(cls, process: TextProcess, most_seconds: float) -> "_Fork":
        seen = process.num_starts
        try:
            number, sock = process.fork(most_seconds)
        except ConnectionError:
            await asyncio.to_thread(process.revive, seen)
            number, sock = process.fork(most_seconds)
        return cls(process, number, *await asyncio.open_unix_connection(sock=sock))

    async def is_lost(self, seconds: float) -> bool:
        """Whether it, having ended, did so together with the process: no new fork answers.

        The system may still be ending the process when a fork's end is seen, so only an answer
        tells that it lives.
        """
        try:
            number, sock = self._process.fork()
            probe = _Fork(self._process, number, *await asyncio.open_unix_connection(sock=sock))
            try:
                nobody = asyncio.get_running_loop().create_future()
                await probe.do(_Piece(_PROBE, nobody), seconds)
            finally:
                probe.end()
        except (OSError, EOFError):
            return True
        return self._process.num_starts != self._seen

    async def do(self, piece: _Piece, seconds: float) -> Done:
        """What comes of a piece.

        Raises:
            TimeoutError: it took too long, or nobody waits for it any more.
            OSError, EOFError: the fork has ended.
        """
        self._writer.writelines([_LENGTH.pack(len(piece.data)), piece.data])
        reply = asyncio.create_task(self._reply())
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({reply, piece.answer}, timeout=seconds, return_when=first)
            if not reply.done():
                raise TimeoutError
            return reply.result()
        finally:
            reply.cancel()
            with suppress(asyncio.CancelledError, OSError, EOFError):
                await reply

    def end(self) -> None:
        """End it, whatever it does."""
        self._writer.close()
        self._process.end_fork(self._number)

    async def _reply(self) -> Done:
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        return _decoder.decode(await self._reader.readexactly(size))
