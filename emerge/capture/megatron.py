"""Megatron-core GPT models: one rank's program in one process, on the CPU.

A factory for campaign files (docs/capture-parallel.md), called in an environment that has megatron-core:

    python: "emerge.capture.megatron:gpt"
    mesh: {tp: 2}
    args: {batch: 2, seq: 16, vocab: 64, output: loss, config: {num_layers: 2, hidden_size: 32, sequence_parallel: true}}

Own models are built inside :func:`patched`, which replaces what needs a GPU; what it replaces is written into the graph.
Megatron marks sharded parameters (``tensor_model_parallel``, ``partition_dim``, ``partition_stride``); these marks become
placements (:mod:`emerge.capture.placements`).
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from emerge.capture.base import CaptureError, Substitution
from emerge.capture.session import Program

#: Axes of a mesh, outermost first: megatron numbers its ranks so.
AXES = ("pp", "dp", "tp")

DEVICE = Substitution(
    "torch.cuda.current_device", "a function that returns the CPU",
    "megatron-core makes its buffers on the current GPU; a capture computes no values",
)  # fmt: skip
RANDOM = Substitution(
    "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork", "a context that does nothing",
    "it switches the generators of the GPU for dropout and initial weights; the capture takes dropout as off, and "
    "weights are inputs",
)  # fmt: skip
NORM = Substitution(
    "megatron.core.transformer.torch_norm.WrappedTorchNorm", "torch.nn.LayerNorm and RMSNorm, weights marked",
    "the wrapper refuses sequence_parallel, which the norms of Apex and TransformerEngine support; they need a GPU. They "
    "compute the same function",
)  # fmt: skip

#: What a capture on the CPU fixes: no fused GPU kernels, no dropout.
FIXED: dict[str, Any] = {
    "use_cpu_initialization": True, "perform_initialization": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "bias_dropout_fusion": False, "bias_activation_fusion": False, "masked_softmax_fusion": False,
    "persist_layer_norm": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False,
}  # fmt: skip
ACTIVATIONS = ("gelu", "silu", "relu")


def gpt(
    mesh: Any, rank: int, *, batch: int = 1, seq: int = 16, vocab: int = 64, output: str = "logits",
    config: Mapping[str, Any] | None = None, position: str = "rope", tied: bool = False,
) -> Program:  # fmt: skip
    """A ``GPTModel`` of the local layer specification (no TransformerEngine), and its example inputs.

    Args:
        mesh: axes of :data:`AXES`, in that order; axes of size one may be left out. ``pp`` stays 1 here.
        output: ``logits`` (b s v, gathered), ``parallel_logits`` (every rank its part of the vocabulary) or ``loss``
            (per token, from labels; by megatron's vocabulary-parallel cross entropy).
        config: fields of ``TransformerConfig``; ``activation_func`` is one of :data:`ACTIVATIONS` by name.
        position: ``rope``, ``learned_absolute`` or ``none``. tied: output layer and embedding share their weight.

    Raises:
        CaptureError: megatron-core is missing, or refuses the config.
    """
    import torch

    sizes = mesh_sizes(mesh)
    if sizes["pp"] > 1:
        raise CaptureError("expected pp 1 in this factory; build pipeline stages in a factory of your own", "mesh")
    stack = ExitStack()
    replaced = stack.enter_context(patched(sizes))
    try:
        layers = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        models = importlib.import_module("megatron.core.models.gpt.gpt_model")
        cfg = transformer_config(config or {}, sizes)
        model = models.GPTModel(
            config=cfg,
            transformer_layer_spec=layers.get_gpt_layer_local_spec(normalization=cfg.normalization),
            vocab_size=vocab,
            max_sequence_length=seq,
            parallel_output=output != "logits",
            position_embedding_type=position,
            share_embeddings_and_output_weights=tied,
        )
    except CaptureError:
        stack.close()
        raise
    except Exception as error:
        stack.close()
        raise CaptureError(
            f"megatron-core refuses the model: {type(error).__name__}: {error}; correct config", "args: config"
        ) from error
    if output not in ("logits", "parallel_logits", "loss"):
        stack.close()
        raise CaptureError(f"expected output logits, parallel_logits or loss, found {output!r}", "args: output")
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": torch.arange(seq).expand(batch, seq).clone()}
    # True where a position must not be seen
    inputs["attention_mask"] = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)
    if output == "loss":
        inputs["labels"] = torch.zeros(batch, seq, dtype=torch.int64)
    return Program(model, (), inputs, substitutions=tuple(replaced), close=stack.close)


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Sizes of all of :data:`AXES` in a device mesh.

    Raises:
        CaptureError: other axes, or another order: megatron would number its ranks differently.
    """
    names = list(mesh.mesh_dim_names or ())
    if names != [a for a in AXES if a in names]:
        raise CaptureError(f"expected mesh axes among {', '.join(AXES)} in this order, found {names}", "mesh")
    return {a: mesh.size(names.index(a)) if a in names else 1 for a in AXES}


def transformer_config(given: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """A ``TransformerConfig`` for the CPU, with the parallel sizes of the mesh.

    Raises:
        CaptureError: a field that megatron-core does not know, or that a capture fixes.
    """
    import torch

    config_type: Any = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    known = {f.name for f in dataclasses.fields(config_type)}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise CaptureError(
                f"TransformerConfig has no field {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                "args: config",
            )
    fields = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, **given, **FIXED}
    activation = fields.get("activation_func")
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise CaptureError(f"expected one of {', '.join(ACTIVATIONS)}, found {activation!r}", "activation_func")
        fields["activation_func"] = getattr(torch.nn.functional, activation)
    fields["tensor_model_parallel_size"] = sizes["tp"]
    fields["pipeline_model_parallel_size"] = sizes["pp"]
    if sizes["pp"] > 1:
        fields.setdefault("pipeline_dtype", torch.float32)
    if sizes["tp"] == 1:
        fields["sequence_parallel"] = False
    return config_type(**{k: v for k, v in fields.items() if k in known})


@contextmanager
def patched(sizes: Mapping[str, int]) -> Iterator[list[Substitution]]:
    """Megatron-core without a GPU, its process groups made for the mesh; gives what was replaced.

    Raises:
        CaptureError: megatron-core is missing.
    """
    import torch

    try:
        state = importlib.import_module("megatron.core.parallel_state")
        random = importlib.import_module("megatron.core.tensor_parallel.random")
        norms = importlib.import_module("megatron.core.transformer.torch_norm")
    except ImportError as error:
        raise CaptureError(
            f"needs the package megatron-core ({error}); install it, or name its environment with python_env", "python"
        ) from None

    class Norm:
        """``WrappedTorchNorm`` that takes ``sequence_parallel``, and marks its weights as the GPU norms do."""

        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
            if config.layernorm_zero_centered_gamma or config.normalization not in ("LayerNorm", "RMSNorm"):
                raise CaptureError(
                    "expected a LayerNorm or RMSNorm with plain weights; other norms need a GPU", "config"
                )
            made = getattr(torch.nn, config.normalization)(hidden_size, eps=eps)
            for parameter in made.parameters():
                parameter.sequence_parallel = config.sequence_parallel
            return made

    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)

        replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
        replace(random.CudaRNGStatesTracker, "fork", lambda self, name=None: nullcontext())
        # the name was imported into the specifications, so the class itself changes
        replace(norms.WrappedTorchNorm, "__new__", Norm.__new__)
        state.destroy_model_parallel()
        stack.callback(state.destroy_model_parallel)
        state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=sizes["pp"],
            create_gloo_process_groups=False,
        )
        yield [DEVICE, RANDOM, NORM]
