"""The demo's loop: read the first bytes as a prompt, then one byte at a time, with every selection verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keysieve.demo.model import Reader, build_model
from keysieve.demo.recorder import Recorder
from keysieve.integrations.transformers import patch

CHUNK = 128
"""Bytes of the prompt fed at once."""


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        text: the bytes to read; the last ``steps`` of them one by one, those before as the prompt.
        steps: decoding steps.
        topk: keys a row selects.
        key_format: of the index cache.
        seed: of the model's weights.
    """

    text: bytes
    steps: int
    topk: int = 256
    key_format: str = "fp8_fp32"
    seed: int = 0

    @property
    def prompt(self) -> int:
        """Bytes read before the first decoding step."""
        return len(self.text) - self.steps


Progress = Callable[[int, Recorder], None]
"""Is told how many bytes have been read."""


def run(settings: Settings, progress: Progress | None = None, recorder: Recorder | None = None) -> Recorder:
    """Read the text; the recorder holds totals and traces, and ``recorder.totals.clean`` the verdict.

    ``recorder`` selects and records; by default a new one that selects on this process alone.
    """
    context = len(settings.text)
    model = build_model(topk=settings.topk, context=context, seed=settings.seed)
    if recorder is None:
        # Prompts come in groups of up to 8 rows, the last of which may be filled up.
        recorder = Recorder(max_rows=CHUNK + 8, context=context, seed=settings.seed)
    hooks = recorder.watch_attention(model)
    done = 0
    try:
        with patch(model, key_format=settings.key_format, select=recorder, max_rows=CHUNK + 8):
            reader = Reader(model)
            while done < context:
                recorder.decoding = done >= settings.prompt
                size = 1 if recorder.decoding else min(CHUNK, settings.prompt - done)
                reader.feed(settings.text[done : done + size])
                done += size
                if progress is not None:
                    progress(done, recorder)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder
