"""When two executed values differ: the threshold rule of a refutation.

A difference counts when it exceeds ten times the response to moving the constants by one ulp of their type, and
1e-9 relative to the size of the tensor. There is no other tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.precision import Perturbation

#: The difference must exceed this many times the response to one-ulp perturbations ...
RESPONSE_FACTOR = 10.0
#: ... and this part of the largest magnitude of the two tensors.
RELATIVE = 1e-9


@dataclass(frozen=True, slots=True)
class Difference:
    """The worst difference of two values.

    Attributes:
        reason: ``value``, ``shape``, ``undefined`` (the implementation is NaN where the reference is defined) or
            ``missing``.
        max_abs_diff: largest absolute difference; inf where one side is infinite or undefined.
        index: position of the worst element, () for scalars and for ``shape``.
        reference, implementation: the two worst elements.
        tolerance: what was allowed.
        count: number of elements above the tolerance.
    """

    reason: str
    max_abs_diff: float
    index: tuple[int, ...] = ()
    reference: float = float("nan")
    implementation: float = float("nan")
    tolerance: float = 0.0
    count: int = 1
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None


def magnitude(*values: Any) -> float:
    """Largest finite absolute value over the tensors, 0.0 when there is none."""
    largest = 0.0
    for value in values:
        if isinstance(value, (int, float)):
            value = torch.tensor(value, dtype=torch.float64)
        if isinstance(value, torch.Tensor) and value.numel():
            absolute = value.to(torch.float64).abs() if not value.is_complex() else value.abs()
            finite = absolute[torch.isfinite(absolute)]
            largest = max(largest, float(finite.max())) if finite.numel() else largest
    return largest


def tolerance(reference: Any, implementation: Any, response: float = 0.0) -> float:
    """Absolute tolerance of the threshold rule for two values.

    Args:
        response: largest absolute change of either side under one-ulp perturbations (:func:`respond`).
    """
    return max(RESPONSE_FACTOR * response, RELATIVE * magnitude(reference, implementation))


def compare_values(reference: Any, implementation: Any, tolerance: float) -> Difference | None:
    """The worst difference above ``tolerance``, or None when the values agree.

    Elements where the reference is NaN are undefined and claim nothing. Equal infinities agree. Integers and
    booleans must be equal exactly, whatever the tolerance. A tolerance of inf (a response that is not finite)
    still reports differing shapes, infinities and undefined elements.
    """
    if isinstance(reference, (list, tuple)) or isinstance(implementation, (list, tuple)):
        return _compare_sequences(reference, implementation, tolerance)
    if reference is None or implementation is None:
        return None if reference is implementation else Difference("missing", float("inf"))
    a, b = (x if isinstance(x, torch.Tensor) else torch.as_tensor(x) for x in (reference, implementation))
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.shape != b.shape:
        return Difference("shape", float("inf"), shapes=(tuple(a.shape), tuple(b.shape)))
    if a.numel() == 0:
        return None
    if a.is_complex() or b.is_complex():
        a, b = (torch.view_as_real(x.to(torch.complex128)) for x in (a, b))
    exact = not (a.is_floating_point() or b.is_floating_point())
    if exact:
        return _compare_exact(a, b)
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    distance = (wide_a - wide_b).abs()
    distance = torch.where(wide_a == wide_b, torch.zeros_like(distance), distance)
    undefined = torch.isnan(wide_b) & ~torch.isnan(wide_a)
    distance = torch.where(undefined, torch.full_like(distance, float("inf")), distance)
    distance = torch.where(torch.isnan(wide_a), torch.zeros_like(distance), distance)
    above = (distance > tolerance) | torch.isinf(distance)
    if not bool(above.any()):
        return None
    flat = int(torch.where(above, distance, torch.full_like(distance, -1.0)).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape)) if a.dim() else ()
    return Difference(
        "undefined" if bool(undefined[index]) else "value",
        float(distance[index]),
        index,
        float(wide_a[index]),
        float(wide_b[index]),
        tolerance,
        int(above.sum()),
    )


def _compare_exact(a: Any, b: Any) -> Difference | None:
    different = a != b
    if not bool(different.any()):
        return None
    distance = (a.to(torch.float64) - b.to(torch.float64)).abs()
    flat = int(torch.where(different, distance, torch.full_like(distance, -1.0)).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape)) if a.dim() else ()
    return Difference(
        "value", float(distance[index]), index, float(a[index]), float(b[index]), 0.0, int(different.sum())
    )


def _compare_sequences(reference: Any, implementation: Any, tolerance: float) -> Difference | None:
    if not isinstance(reference, (list, tuple)) or not isinstance(implementation, (list, tuple)):
        return Difference("shape", float("inf"))
    if len(reference) != len(implementation):
        return Difference("shape", float("inf"), shapes=((len(reference),), (len(implementation),)))
    found = [compare_values(a, b, tolerance) for a, b in zip(reference, implementation)]
    return max((d for d in found if d is not None), key=lambda d: d.max_abs_diff, default=None)


@dataclass(frozen=True, slots=True)
class Response:
    """How far values move when the constants move by one ulp.

    Attributes:
        base: values without perturbation.
        by_name: largest absolute change per name over all perturbations; inf when it is not finite, when a shape
            changes or when an integer result changes.
        touched: number of constants that were moved, 0 = there is none.
    """

    base: dict[str, Any]
    by_name: dict[str, float]
    touched: int


#: The perturbations a response is measured with.
PERTURBATIONS: tuple[tuple[str, int], ...] = (("up", 0), ("random", 1), ("random", 2))


def respond(
    run: Callable[[Perturbation | None], Mapping[str, Any]],
    names: Iterable[str] | None = None,
    perturbations: Iterable[tuple[str, int]] = PERTURBATIONS,
) -> Response:
    """Measure the response of a run to one-ulp perturbations of its constants.

    Args:
        run: executes the program with the given perturbation (None = unperturbed) and returns values by name.
        names: the values of interest; all when None.
        perturbations: ``(mode, seed)`` pairs.
    """
    base = dict(run(None))
    wanted = list(base) if names is None else list(names)
    by_name = dict.fromkeys(wanted, 0.0)
    touched = 0
    for mode, seed in perturbations:
        perturbation = Perturbation(mode, seed)
        moved = run(perturbation)
        touched = max(touched, perturbation.touched)
        if perturbation.touched == 0:
            continue
        for name in wanted:
            by_name[name] = max(by_name[name], _change(base[name], moved[name]))
    return Response(base, by_name, touched)


def _change(before: Any, after: Any) -> float:
    found = compare_values(before, after, 0.0)
    if found is None:
        return 0.0
    integers = isinstance(before, torch.Tensor) and not (before.is_floating_point() or before.is_complex())
    return float("inf") if integers or found.reason != "value" else found.max_abs_diff


def defined_fraction(reference: Any) -> float:
    """Part of the elements of a reference value that are defined (not NaN); 1.0 for integers and empty tensors.

    :func:`compare_values` claims nothing where the reference is undefined, so a sample with a small fraction says
    little and one with 0.0 says nothing: draw another one.
    """
    if isinstance(reference, (list, tuple)):
        return min((defined_fraction(v) for v in reference), default=1.0)
    if not isinstance(reference, torch.Tensor) or not reference.is_floating_point() or reference.numel() == 0:
        return 1.0
    return 1.0 - float(torch.isnan(reference).to(torch.float64).mean())
