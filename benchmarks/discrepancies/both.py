"""One model in Transformers and in vLLM's engine, without Emerge: the log-probabilities of a prompt, side by side.

Needs torch, transformers and vLLM (CPU build) only; the scripts beside it call :func:`compare`. ``python both.py`` runs
them all and imports vLLM once.
"""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any

for key, value in {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TOKENIZERS_PARALLELISM": "false",
}.items():  # fmt: skip
    os.environ.setdefault(key, value)

import torch  # noqa: E402
import transformers  # noqa: E402

#: 64 wide, heads of 32: sizes that vLLM's attention kernel for CPUs has.
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip


def difference(architecture: str, config: dict[str, Any], tokens: int = 24, zero: str = "") -> float:
    """Largest difference of the log-probabilities of a random prompt; both have the same random weights, float32.

    Parameters with ``zero`` in their names are 0.
    """
    torch.manual_seed(0)
    cls = getattr(transformers, architecture)
    settings = cls.config_class(**copy.deepcopy(config))
    settings._attn_implementation = "eager"
    model = cls._from_config(settings, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if zero and zero in name:
                tensor.zero_()
                continue
            noise = 0.2 * torch.randn(tensor.shape)
            tensor.copy_(tensor + noise if "norm" in name.lower() or "ln_" in name else noise)
    prompt = torch.randint(3, settings.vocab_size, (tokens,))
    with torch.no_grad():
        expected = model(input_ids=prompt[None], use_cache=False).logits[0].log_softmax(-1)
    with tempfile.TemporaryDirectory() as folder:
        settings.architectures = [architecture]
        model.config = settings
        model.save_pretrained(folder)
        settings.save_pretrained(folder)
        found = _engine(folder, prompt.tolist(), settings.vocab_size)
    return max(
        abs(expected[i - 1, token].item() - entry.logprob)
        for i, of in enumerate(found)
        if of is not None
        for token, entry in of.items()
        if token < settings.vocab_size
    )


def _engine(folder: str, prompt: list[int], vocabulary: int) -> Any:
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=1,
        max_logprobs=vocabulary, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=vocabulary, detokenize=False, temperature=0.0)
    (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return output.prompt_logprobs


def in_process(architecture: str, config: dict[str, Any], tokens: int, zero: str) -> float:
    """The difference of logits without the engine: vLLM's layers and loader, plain attention."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from vllm_flags_worker import executed

    found = executed({"architecture": architecture, "config": config, "tokens": tokens, "max_model_len": 64})
    return float(found["difference"])


def compare(
    architecture: str, config: dict[str, Any], change: dict[str, Any], zero: str = "", how: Any = difference
) -> None:
    """Prints the difference without and with ``change``, each in a fork; fails unless only the latter differs.

    ``how``: the function that measures. ``zero``: what is changed is that parameters of this name are random and no longer 0.
    """
    import multiprocessing

    from vllm import LLM, __version__  # noqa: F401  (imported once, before the forks)

    print(f"{architecture}: transformers {transformers.__version__}, vllm {__version__}, torch {torch.__version__}")
    found = []
    for settings, zeros in ((config, zero), (config | change, "")):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found.append(pool.apply(how, (architecture, settings, 24, zeros)))
    print(f"  without: largest difference {found[0]:.2g}")
    print(f"  with {change or f'{zero} other than 0'}: {found[1]:.2g}", flush=True)
    assert found[0] < 1e-4 < 5e-4 < found[1], "the discrepancy does not show"


def main() -> None:
    """Runs the scripts given, or all beside this file, each in a fork."""
    import runpy
    import sys
    import traceback
    from pathlib import Path

    from vllm import LLM  # noqa: F401

    here = Path(__file__).resolve()
    sys.path.insert(0, str(here.parent))
    failed = []
    for script in sys.argv[1:] or sorted(str(p) for p in here.parent.glob("*_*.py")):
        print(f"{Path(script).stem}", flush=True)
        process = os.fork()
        if process == 0:
            code = 1
            try:
                runpy.run_path(script, run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        if os.waitpid(process, 0)[1]:
            failed.append(script)
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
