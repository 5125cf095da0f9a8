"""Decode steps as CUDA graphs, launched before the host has read the tokens of the step before.

A decode step of a small model is so many kernels that Python launches them more slowly than a GPU runs them
(for 28 layers 19.6 ms a step were published, see fit.py). So the step is recorded once for a few numbers of
rows, with inputs that stay where they are in memory, and played back. All that a step needs of the one before
is its tokens, and these are on the device already: so while the same rows go on, the host launches a step and
only then reads the tokens of the one before, ends trajectories and parses calls, and the GPU works meanwhile.

Not run on a GPU yet. On CPU the same code runs without recording, pinned memory, streams and events: tests
there see which row is fed what, and that the host never waits, but none of those four. Axis letters: R
places, M blocks of the longest sequence, H hidden size. Left out: graphs of steps that also feed prompts or
tool results. To copy into another project take attention.py along.
"""

import functools
from collections.abc import Callable

import torch

from attention import Blocks, Segments, trunk


@functools.cache
def side_stream(device) -> torch.cuda.Stream:
    """One for all steps: libraries keep a workspace for each stream that they have seen."""
    return torch.cuda.Stream(device)


class DecodeStep:
    """A token for each of `rows` sequences.

    model, blocks   as of the Sampler
    rows            R; places without a sequence write to block 0, which belongs to nobody
    width           M
    draw            (hidden [R, H], uniform [R]) -> token [R], logprob [R], without waiting for the device
    pool            of torch.cuda.graph_pool_handle(): memory that several graphs share
    """

    def __init__(self, model, blocks: Blocks, rows: int, width: int, draw: Callable, pool=None):
        self.model, self.blocks, self.draw = model, blocks, draw
        device, cuda = model.device, model.device.type == "cuda"
        # past, then the table of each row: one tensor, one copy to the device
        self.places = torch.zeros(rows, 1 + width, dtype=torch.long, device=device)
        self.uniform = torch.zeros(rows, dtype=torch.float64, device=device)
        self.ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.drawn = torch.zeros(2, rows, dtype=torch.float64, device=device)  # tokens, log-probs
        # in pinned memory, of two steps: one is read or filled while the device uses the other
        used = (self.places, self.uniform, self.ids, self.drawn)
        self.staged = [[torch.zeros(t.shape, dtype=t.dtype, pin_memory=cuda) for t in used] for _ in range(2)]
        self.half, self.unread, self.graph = 0, 0, None  # half: which of the two is filled next
        if cuda:
            if torch.cuda.current_device() != device.index:
                raise ValueError(f"graphs on {device} need torch.cuda.set_device({device.index}) first")
            aside = side_stream(device)
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # what libraries set up at a first call must not be recorded
                for _ in range(2):
                    self._compute()
            torch.cuda.current_stream().wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            # thread_local: NCCL's threads may look at their events meanwhile
            with torch.cuda.graph(self.graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
                self._compute()

    def _compute(self) -> None:
        seg = Segments.decoding(self.places[:, 0], self.places[:, 1:], self.blocks)
        token, logprob = self.draw(trunk(self.model, self.ids, seg), self.uniform)
        self.drawn.copy_(torch.stack([token.double(), logprob.double()]))  # a token's number is exact
        self.ids.copy_(token)  # what the next step feeds

    def launch(
        self, past: list[int], tables: list[list[int]], uniform, ids: list[int] | None = None
    ) -> Callable:
        """Start the step; the function returned waits for it and gives (tokens, log-probs) [of each row].

        past: tokens that the cache holds of each row; ids: its last token, None: the one that the step
        before has drawn. At most one step may be unread when another is launched.
        """
        if ids is not None and self.unread:  # left by a run that was broken off
            if self.graph:
                torch.cuda.synchronize()
            self.unread = 0
        assert self.unread < 2, f"{self.unread} steps are unread: a third would overwrite the first's memory"
        self.unread += 1
        n = len(past)
        places, uniforms, last, drawn = self.staged[self.half]
        self.half ^= 1
        view = places.numpy()  # of the same memory
        view[:] = 0
        view[:n, 0] = past
        for i, table in enumerate(tables):
            view[i, 1 : 1 + len(table)] = table
        uniforms.numpy()[:n] = uniform
        self.places.copy_(places, non_blocking=True)
        self.uniform.copy_(uniforms, non_blocking=True)
        if ids is not None:
            last.numpy()[:n] = ids
            self.ids.copy_(last, non_blocking=True)
        if self.graph:
            self.graph.replay()
        else:
            self._compute()
        drawn.copy_(self.drawn, non_blocking=True)
        done = torch.cuda.Event() if self.graph else None
        if done:
            done.record()

        def read() -> tuple[list[int], list[float]]:
            if done:
                done.synchronize()
            self.unread -= 1
            tokens, logprobs = drawn[:, :n].tolist()
            return [int(t) for t in tokens], logprobs

        return read
