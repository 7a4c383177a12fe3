"""Local safetensors weights of a Transformers model: loaded as ``from_pretrained`` does, without any network.

With data the loaded values become those of the model's parameters. Without data only names and shapes are compared,
from the headers of the files. Either way a folder that does not fit the model is one error that says how.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from emerge.capture.base import CaptureError

#: Names listed of each kind of contradiction.
_LISTED = 3
_LARGEST_HEADER = 100 << 20


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.

    Raises:
        CaptureError: there are none.
    """
    found = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not found:
        raise CaptureError(
            "expected a local folder with *.safetensors files, found none; correct the path", f"weights: {folder}"
        )
    return found


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of all files of a folder, from their headers.

    Raises:
        CaptureError: a file is no safetensors file.
    """
    out: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > _LARGEST_HEADER:
                    raise ValueError("its header is too long")
                header = json.loads(file.read(size))
            out |= {k: tuple(int(n) for n in v["shape"]) for k, v in header.items() if k != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CaptureError(
                f"expected a safetensors file, found one that cannot be read ({error})", str(path)
            ) from None
    return out


def load_weights(model: Any, folder: Path) -> dict[str, Any]:
    """Label -> values of parameters and persistent buffers of a model's class and config, from a folder.

    Args:
        model: an instance with the same config; nothing is written into it.

    Raises:
        CaptureError: tensors are missing, left over or of another shape; or loading fails.
    """
    weight_files(folder)
    cls = type(model)
    with _quiet():
        try:
            loaded, info = cls.from_pretrained(
                folder, config=model.config, dtype=model.dtype, local_files_only=True, output_loading_info=True,
                ignore_mismatched_sizes=True, use_safetensors=True,
            )  # fmt: skip
        except Exception as error:
            text = (str(error) or type(error).__name__).strip().splitlines()[0]
            raise CaptureError(f"transformers cannot load them: {text}", f"weights: {folder}") from error
    other = [f"{n} ({list(a)} instead of {list(b)})" for n, a, b in sorted(info["mismatched_keys"], key=str)]
    _refuse(folder, cls.__name__, info["missing_keys"], info["unexpected_keys"], other)
    return dict(loaded.state_dict())


def check_headers(model: Any, folder: Path) -> None:
    """Names and shapes alone, for models without data.

    Classes whose checkpoints have another layout than the model (fused experts) are left to the run that loads them.

    Raises:
        CaptureError: as :func:`load_weights`.
    """
    stored = stored_shapes(folder)
    if _converts(model):
        return
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    tied = {k for k in wanted if k not in stored and _is_tied(model, k)}
    other = [
        f"{k} ({list(stored[k])} instead of {list(wanted[k])})"
        for k in sorted(stored)
        if k in wanted and stored[k] != wanted[k]
    ]
    _refuse(folder, type(model).__name__, set(wanted) - set(stored) - tied, set(stored) - set(wanted), other)


def put_weights(model: Any, values: dict[str, Any]) -> None:
    """Gives a model's parameters and persistent buffers these values; what is shared stays shared."""
    import torch

    made: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                label = f"{prefix}.{key}" if prefix else key
                if tensor is None or (id(tensor) not in made and label not in values):
                    continue
                if id(tensor) not in made:
                    value = values[label].detach()
                    made[id(tensor)] = torch.nn.Parameter(value) if isinstance(tensor, torch.nn.Parameter) else value
                table[key] = made[id(tensor)]


def _is_tied(model: Any, name: str) -> bool:
    """True where the parameter is another one's under a second name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return sum(p is named.get(name) for p in named.values()) > 1


def _converts(model: Any) -> bool:
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return True
    return bool(get_checkpoint_conversion_mapping(getattr(model.config, "model_type", "")))


def _refuse(folder: Path, what: str, missing: Iterable[str], left: Iterable[str], other: list[str]) -> None:
    kinds = [(sorted(missing), "missing"), (sorted(left), "left over"), (other, "of another shape")]
    words = []
    for names, word in kinds:
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            words.append(f"{len(names)} {word} ({', '.join(names[:_LISTED])}{more})")
    if words:
        raise CaptureError(
            f"the tensors do not fit {what} with this config: {'; '.join(words)}; give the config of these weights",
            f"weights: {folder}",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and load reports of Transformers, and no look at the network."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    offline = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
        if offline is None:
            os.environ.pop("HF_HUB_OFFLINE", None)
        else:
            os.environ["HF_HUB_OFFLINE"] = offline
