"""A model whose matrices note their inputs, and the runs over texts that they note them in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.api.llm import LLM
from quire.engine.build import build_engine
from quire.engine.engine import Engine
from quire.models.causal_lm import CausalLM
from quire.models.source import free_memory, open_model
from quire.params import SamplingParams
from quire.quantize.settings import CalibrationConfig
from quire.quantize.watched import WatchedFormats, WatchedMatrix
from quire.runner.device import choose_device
from quire.runner.runner import ModelRunner

LENGTH = 256  # tokens of a text
MOST_SEQUENCES = 32
BLOCK = 16  # tokens
SHARE_OF_MEMORY = 4  # Hessians take one part of so many of what is free


class WatchedLLM(LLM):
    """It computes in float32 on a CPU and in the checkpoint's type on a GPU, whole prompts, each
    product in a launch of its own."""

    def __init__(self, folder: Path, config: CalibrationConfig, progress: bool) -> None:
        self.device = choose_device(config.device)
        longest = open_model(str(folder), progress=False).config.max_position_embeddings
        self.text_length = min(LENGTH, longest - 1)
        super().__init__(
            str(folder),
            device=config.device,
            dtype="float32" if self.device.type == "cpu" else "auto",
            max_model_len=self.text_length + 1,
            max_num_seqs=MOST_SEQUENCES,
            block_size=BLOCK,
            num_blocks=MOST_SEQUENCES * (self.text_length // BLOCK + 1),
            enforce_eager=True,
            enable_prefix_caching=False,
            use_tqdm=progress,
        )

    def _build_engine(self, progress: bool) -> Engine:
        return build_engine(self.config, progress, formats=WatchedFormats())

    @property
    def model(self) -> CausalLM:
        runner = self.engine.runner
        assert isinstance(runner, ModelRunner)  # there is one rank
        return runner.model

    def __enter__(self) -> WatchedLLM:
        return self

    def watch(self, matrices: Sequence[WatchedMatrix], texts: Sequence[list[int]]) -> None:
        """Add up the Hessians of some matrices over the texts.

        Where K is made, a text's first token counts as much as all the others: most heads attend to
        it when they have nowhere else to look, so an error of its K reaches every token.
        """
        self._watch(matrices, texts, weight=1.0)
        if makers := [matrix for matrix in matrices if matrix.makes_keys]:
            firsts = [text[:1] for text in texts]
            self._watch(makers, firsts, weight=float(self.text_length))

    def _watch(
        self, matrices: Sequence[WatchedMatrix], texts: Sequence[list[int]], weight: float
    ) -> None:
        for matrix in matrices:
            matrix.notes.weight = weight
        self.generate(list(texts), SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        for matrix in matrices:
            matrix.notes.weight = 0.0

    def matrices(self) -> list[WatchedMatrix]:
        return [each for each in self.model.modules() if isinstance(each, WatchedMatrix)]

    def turns(self) -> Iterator[list[WatchedMatrix]]:
        """Groups of matrices whose Hessians fit into memory together: all matrices in the end."""
        room = free_memory(self.device) // SHARE_OF_MEMORY
        turn: list[WatchedMatrix] = []
        taken = 0
        for matrix in self.matrices():
            if turn and taken + matrix.hessian_bytes > room:
                yield turn
                turn, taken = [], 0
            turn.append(matrix)
            taken += matrix.hessian_bytes
        if turn:
            yield turn
