"""Runs where vLLM is installed: captures pairs through Emerge's own specs, and executes both models without Emerge.

    python vllm_flags_worker.py execute|capture REQUEST.json

``REQUEST.json`` holds ``[{"id", "architecture", "config", "vllm_architecture"?, "vllm_config"?, "tokens", "tp_size"?,
"max_model_len", "out"}]``. Every pair gets a fork of this process, which has vLLM imported. ``execute`` writes
``truth.json`` (nothing of Emerge takes part but the settings for the import), ``capture`` writes ``seq.json``,
``rank*.json`` and ``capture.json``; a failure is written as ``error``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS = 150

Pair = dict[str, Any]


def main(what: str, request: str) -> int:
    """All pairs of a request, one after another."""
    warnings.filterwarnings("ignore")
    from emerge.capture.vllm.runtime import import_vllm

    import_vllm()
    import torch
    import transformers
    import vllm.model_executor.models.registry  # noqa: F401

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for pair in json.loads(Path(request).read_text(encoding="utf-8")):
        out = Path(pair["out"])
        out.mkdir(parents=True, exist_ok=True)
        started = time.time()
        if what == "execute":
            found = in_fork(lambda pair=pair: executed(pair), out / "truth.json")
            said = (
                f"difference {found['difference']:.3g} of {found['scale']:.3g}" if "scale" in found else found["error"]
            )
        else:
            found = in_fork(lambda pair=pair, out=out: captured(pair, out), out / "capture.json")
            said = found.get("error", "captured")
        print(f"{pair['id']}: {said} ({time.time() - started:.1f} s)", flush=True)
    return 0


def in_fork(work: Callable[[], dict[str, Any]], target: Path) -> dict[str, Any]:
    """The result of ``work``, also written to ``target``; what it leaves behind in the process dies with the fork."""
    target.unlink(missing_ok=True)
    process = os.fork()
    if process == 0:
        import signal

        signal.alarm(SECONDS)
        try:
            result = work()
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:400]
            result = {"error": f"{type(error).__name__}: {text}", "at": f"{last.filename}:{last.lineno}"}
        target.write_text(json.dumps(result), encoding="utf-8")
        os._exit(0)
    os.waitpid(process, 0)
    if not target.exists():
        target.write_text(json.dumps({"error": f"ended by a signal or after {SECONDS} s", "at": ""}), encoding="utf-8")
    found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return found


def captured(pair: Pair, out: Path) -> dict[str, Any]:
    """Both graphs through the specs ``hf:`` and ``vllm:``."""
    from emerge.capture.source import load_spec, parse_spec
    from emerge.graph.json_io import write_graph, write_values

    tokens = pair["tokens"]
    vllm = {
        "architecture": pair["architecture"], "config": pair["config"], "max_model_len": pair["max_model_len"],
        "tp_size": pair.get("tp_size", 1),
    }  # fmt: skip
    vllm |= {k: pair[k] for k in ("vllm_architecture", "vllm_config") if k in pair}
    hf = {"architecture": pair["architecture"], "config": copy.deepcopy(pair["config"]), "attention": "eager"}
    seconds: dict[str, float] = {}
    started = time.time()
    graphs = load_spec(parse_spec({"hf": hf, "inputs": {"batch": 1, "seq": tokens}}), cache=False)
    seconds["hf"] = time.time() - started
    graphs += load_spec(parse_spec({"vllm": vllm, "inputs": {"tokens": tokens}}), cache=False)
    seconds["vllm"] = time.time() - started - seconds["hf"]
    for name, graph in zip(["seq.json", *(f"rank{g.rank}.json" for g in graphs[1:])], graphs):
        write_graph(graph, out / name)
        write_values(graph, out / f"{name}.npz")
    return {"seconds": seconds, "ranks": len(graphs) - 1, "weights": graphs[1].extra["weights"]}


# ---- execution without Emerge -------------------------------------------------------------------------------------------


def executed(pair: Pair) -> dict[str, Any]:
    """Largest difference of the logits of Transformers (eager) and vLLM (its kernels, plain attention), float32, one rank."""
    import torch
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, pair["architecture"])
    config = cls.config_class(**copy.deepcopy(pair["config"]))
    config._attn_implementation = "eager"
    reference = cls._from_config(config, dtype=torch.float32).eval()
    _randomise(reference)
    ids = torch.randint(3, config.vocab_size, (pair["tokens"],), generator=torch.Generator().manual_seed(1))
    checkpoint = _checkpoint(reference)
    with torch.no_grad():
        wanted = reference(input_ids=ids[None], use_cache=False).logits[0]
        found = _vllm_logits(pair, config, checkpoint, ids)[:, : wanted.shape[-1]]
    difference = (wanted - found).abs()
    bad = (difference.amax(-1) > 5e-5 * wanted.abs().max()).nonzero()
    return {
        "difference": float(difference.max()), "scale": float(wanted.abs().max()),
        "first_bad_token": int(bad[0]) if len(bad) else None,
        "finite": bool(wanted.isfinite().all() and found.isfinite().all()),
        "vllm_class": _vllm_logits.seen,
    }  # fmt: skip


def _randomise(model: Any) -> None:
    """Norm weights near what they were, biases and matrices random, so that nothing is left out by being 0 or 1."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        done = set()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.data_ptr() in done or not tensor.is_floating_point() or name not in model.state_dict():
                continue
            done.add(tensor.data_ptr())
            noise = 0.2 * torch.randn(tensor.shape, generator=generator)
            norm = "norm" in name.lower() or "ln_" in name or (tensor.ndim <= 1 and name.endswith("weight"))
            tensor.copy_(tensor + noise if norm else noise)


def _checkpoint(model: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for file in sorted(Path(folder).glob("*.safetensors")):
            found |= load_file(file)
    return found


def _vllm_logits(pair: Pair, config: Any, checkpoint: dict[str, Any], ids: Any) -> Any:
    import inspect

    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.architectures = [pair.get("vllm_architecture") or pair["architecture"]]
    for key, value in pair.get("vllm_config", {}).items():
        setattr(config, key, value)
    with tempfile.TemporaryDirectory() as folder, _plain_attention():
        config.save_pretrained(folder)
        engine = EngineArgs(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32",
            max_model_len=pair["max_model_len"], seed=0, enable_prefix_caching=False,
            compilation_config={"mode": 0, "custom_ops": ["none"]},
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(engine):
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
            with set_default_torch_dtype(torch.float32), torch.device("cpu"):
                model = initialize_model(vllm_config=engine).eval()
            loaded = model.load_weights(iter(checkpoint.items()))
            left = _not_loaded(model, loaded)
            if left:
                raise ValueError(f"Following weights were not initialized from checkpoint: {left}")
            process_weights_after_loading(model, engine.model_config, torch.device("cpu"))
            with set_forward_context(None, engine, num_tokens=len(ids)), torch.compiler.set_stance("force_eager"):
                names = inspect.signature(model.forward).parameters
                key = "positions" if "positions" in names else "position_ids"
                hidden = model(input_ids=ids, **{key: torch.arange(len(ids))})
                _vllm_logits.seen = f"{type(model).__module__.rsplit('.', 1)[-1]}.{type(model).__name__}"
                return model.compute_logits(hidden)


_vllm_logits.seen = ""


def _not_loaded(model: Any, loaded: Any) -> list[str]:
    """What vLLM's DefaultModelLoader refuses; it leaves out layers with a quantisation method, also that of plain weights."""
    if loaded is None:
        return []
    exempt = {
        f"{name}.{label}"
        for name, module in model.named_modules()
        if hasattr(getattr(module, "quant_method", None), "process_weights_after_loading")
        for label, _ in module.named_parameters()
    }
    return sorted({label for label, _ in model.named_parameters()} - set(loaded) - exempt)


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """vLLM's attention layers as softmax attention on one sequence, from what their implementation object holds."""
    import torch
    from vllm.model_executor.layers.attention import attention, mla_attention

    shared: dict[str, Any] = {}

    def attend(layer: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
        impl = layer.impl
        n, per = q.shape[0], q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(per, 1).transpose(0, 1) for t in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * scale
        cap = getattr(impl, "logits_soft_cap", None)
        if cap:
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(n)[:, None] - torch.arange(n)[None]
        slopes = getattr(impl, "alibi_slopes", None)
        if slopes is not None:
            scores = scores - slopes.float()[:, None, None] * distance
        seen = distance >= 0 if layer_kind(layer) == "decoder" else torch.ones(n, n, dtype=torch.bool)
        window = getattr(impl, "sliding_window", None)
        if window and window > 0:
            seen = seen & (distance < window) & (distance > -window)
        chunk = getattr(layer, "attention_chunk_size", None)
        if chunk:
            seen = seen & (torch.arange(n)[:, None] // chunk == torch.arange(n)[None] // chunk)
        scores = scores.masked_fill(~seen, float("-inf"))
        sinks = getattr(impl, "sinks", None)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, n, 1)], -1)
        return (scores.softmax(-1)[..., :n] @ v).transpose(0, 1)

    def layer_kind(layer: Any) -> str:
        kind = getattr(layer, "attn_type", "decoder")
        return str(getattr(kind, "value", kind))

    def forward(self: Any, query: Any, key: Any, value: Any, output_shape: Any = None, output_dtype: Any = None) -> Any:
        q = query.view(-1, self.num_heads, self.head_size)
        if self.kv_sharing_target_layer_name is not None:
            k, v = shared[self.kv_sharing_target_layer_name]
        else:
            k, v = key.view(-1, self.num_kv_heads, self.head_size), value.view(-1, self.num_kv_heads, self.head_size_v)
            shared[self.layer_name] = (k, v)
        out = attend(self, q, k, v, self.impl.scale)
        return out.reshape(output_shape if output_shape is not None else (q.shape[0], -1))

    def latent(self: Any, q: Any, latents: Any, k_pe: Any, output_shape: Any = None, **kwargs: Any) -> Any:
        n, heads = q.shape[:2]
        kv = (latents @ self.kv_b_proj.weight.t()).view(n, heads, self.qk_nope_head_dim + self.v_head_dim)
        k = torch.cat([kv[..., : self.qk_nope_head_dim], k_pe.reshape(n, 1, -1).expand(n, heads, -1)], -1)
        return attend(self, q, k, kv[..., self.qk_nope_head_dim :], self.scale).reshape(output_shape)

    from unittest.mock import patch

    from vllm.model_executor.layers import utils

    def linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    with (
        patch.object(attention.Attention, "forward", forward),
        patch.object(mla_attention.MLAAttention, "forward", latent),
        patch.object(utils, "dispatch_cpu_unquantized_gemm", linear),
    ):
        yield


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
