"""Every model of the zoo is captured exactly, in both modes and at other batch sizes, or refused.

So that this takes a minute or two, large models are judged in one mode, and each model at one other
batch size; all sizes occur. `python -m benchmarks.capture` judges every model in both modes at
every size.
"""

from __future__ import annotations

import pytest

from pipecompile.errors import CaptureError
from pipecompile.frontend.target import Target
from tests.sweeps import sweep
from zoo.decoders import DECODERS
from zoo.diffusion import DIFFUSION
from zoo.judge import BATCHES, MODES, by_pipecompile, verdict
from zoo.language import LANGUAGE
from zoo.models import MODELS
from zoo.vision import VISION

CAPTURED_AT, *OTHERS = BATCHES
LARGE = LANGUAGE | DECODERS | VISION | DIFFUSION
REFUSED: dict[str, str] = {}  # model → what the error says


def _differences(name: str) -> dict[str, list[str]]:
    """What differs, by mode and batch."""
    target, index = Target.of(MODELS[name](), name), list(MODELS).index(name)
    differing = {}
    for turn in (index, index + 1) if name not in LARGE else (index,):
        batches = CAPTURED_AT, OTHERS[turn // 2 % len(OTHERS)]
        differing |= verdict(by_pipecompile, target, batches, (MODES[turn % 2],))
    return differing


ALIKE = {
    *("transformer", "segformer", "denoiser", "deit", "regnet", "siamese", "shared"),
    *("mistral", "qwen2", "phi", "gemma", "falcon", "bloom", "gpt_neox", "opt", "llama_gqa"),
    *("bert", "roberta", "distilbert", "albert", "electra"),
    *("phi3", "olmo2", "granite", "cohere", "starcoder2", "smollm3", "gemma2"),
}
"""They have no kind of layer that other models do not have."""


@pytest.mark.one_case_in(9)
@pytest.mark.parametrize("name", [sweep(name) if name in ALIKE else name for name in MODELS])
def test_the_capture_is_the_model(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(CaptureError, match=REFUSED[name]):
            _differences(name)
    else:
        assert _differences(name) == {}


def test_hardly_any_model_is_refused() -> None:
    assert len(MODELS) >= 70
    assert len(REFUSED) <= len(MODELS) / 30
