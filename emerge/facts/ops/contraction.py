"""Contractions: matrix products in all their spellings become ``dot``, bilinear with summed axes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import Iter, Lowering, Tensor, Unsupported, lowers, scalar_constant, whole


def einsum(low: Lowering, spec: str, x: Tensor, y: Tensor, dtype: str, reduction: str = "sum") -> Tensor:
    """``spec`` such as ``"ik,kj->ij"``; letters of size 1 broadcast."""
    inputs, out = spec.split("->")
    left, right = inputs.split(",")
    sizes: dict[str, int] = {}
    for letters, t in ((left, x), (right, y)):
        for letter, n in zip(letters, t.shape):
            if sizes.get(letter, 1) in (1, n):
                sizes[letter] = max(n, sizes.get(letter, 1))
            elif n != 1:
                raise Unsupported(f"axis {letter} has sizes {sizes[letter]} and {n}")

    def where(letter: str) -> tuple[tuple[int, Any], ...]:
        found = []
        for k, (letters, t) in enumerate(((left, x), (right, y))):
            if letter in letters and t.shape[letters.index(letter)] == sizes[letter]:
                found.append((k, whole(sizes[letter], letters.index(letter))))
        return tuple(found)

    order = list(out) + [c for c in dict.fromkeys(left + right) if c not in out]
    iters = [
        Iter(sizes[c], "p" if c in out else reduction, whole(sizes[c], out.index(c)) if c in out else (), where(c))
        for c in order
    ]
    shape = [sizes[c] for c in out]
    if all(sizes[c] == 1 for c in order if c not in out) and reduction == "sum":
        # nothing is summed: an outer product
        from emerge.facts.ops.layout import spread

        factors = [spread(low, x, left, out, sizes), spread(low, y, right, out, sizes)]
        return low.pointwise("mul", "mul", factors, dtype, commutative=True)
    result = low.op("dot", "dot", [x, y], iters, shape, dtype)
    if reduction == "sum":
        low.remember(result, "einsum", [x, y], spec)
    if low.side == 1 and x.id != y.id:
        swapped = [Iter(i.size, i.role, i.out, tuple((1 - k, t) for k, t in i.args)) for i in iters]
        low.commuted(result, "dot", "dot", [y, x], swapped)
    return result


def matmul(low: Lowering, x: Tensor, y: Tensor, dtype: str) -> Tensor:
    """``torch.matmul``: vectors, matrices and batches of them."""
    if len(x.shape) == 1 and len(y.shape) == 1:
        return einsum(low, "k,k->", x, y, dtype)
    if len(x.shape) == 1:
        batch = "abcdefgh"[: len(y.shape) - 2]
        return einsum(low, f"k,{batch}kj->{batch}j", x, y, dtype)
    if len(y.shape) == 1:
        batch = "abcdefgh"[: len(x.shape) - 1]
        return einsum(low, f"{batch}k,k->{batch}", x, y, dtype)
    letters = "abcdefgh"[: max(len(x.shape), len(y.shape)) - 2]
    left, right = letters[len(letters) - len(x.shape) + 2 :], letters[len(letters) - len(y.shape) + 2 :]
    return einsum(low, f"{left}ik,{right}kj->{letters}ij", x, y, dtype)


@lowers("aten.mm", "aten.bmm", "aten.matmul", "aten.dot", "aten.mv")
def mm(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return matmul(low, args[0], args[1], node.dtype or args[0].dtype)


@lowers("aten.linear")
def linear(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, w = args[0], args[1]
    bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
    batch = "abcdefgh"[: len(x.shape) - 1]
    y = einsum(low, f"{batch}k,jk->{batch}j", x, w, x.dtype)
    return y if bias is None else low.pointwise("add", "add", [y, bias], x.dtype, commutative=True)


def _combined(low: Lowering, base: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    """``beta * base + alpha * product``; with beta = 0 the base is not read."""
    a, b = scalar_constant(alpha), scalar_constant(beta)
    if not isinstance(a, Fraction) or not isinstance(b, Fraction):
        raise Unsupported("alpha or beta is not a number")
    product = low.scaled(product, a)
    if b == 0:
        return product
    return low.pointwise("add", "add", [low.scaled(base, b), product], product.dtype, commutative=True)


@lowers("aten.addmm", "aten.baddbmm", "aten.addmm_", "aten.addmv", "aten.addbmm")
def addmm(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    if node.op.startswith("aten.addbmm"):
        raise Unsupported("addbmm")
    beta, alpha = (
        kwargs.get("beta", args[3] if len(args) > 3 else 1),
        kwargs.get("alpha", args[4] if len(args) > 4 else 1),
    )
    product = matmul(low, args[1], args[2], node.dtype or args[1].dtype)
    if scalar_constant(beta) == 0:
        return _combined(low, product, product, beta, alpha)
    return low.broadcast_to(_combined(low, args[0], product, beta, alpha), node.shape)


@lowers("aten.einsum")
def einsum_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    spec, operands = args[0].replace(" ", ""), args[1]
    if len(operands) != 2 or "." in spec or "->" not in spec:
        raise Unsupported(f"einsum {spec!r} over {len(operands)} operands")
    return einsum(low, spec, operands[0], operands[1], node.dtype or operands[0].dtype)


@lowers("aten._grouped_mm")
def grouped_mm(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """``x [t, k], w [e, k, n], offs [e] -> [t, n]``: rows up to ``offs[0]`` times ``w[0]``, and so on.

    Which matrix a row meets depends on its position, so rows and experts are ordered axes; ``k`` is summed, ``n`` parallel.
    """
    x, w = args[0], args[1]
    offs = kwargs.get("offs", args[2] if len(args) > 2 else None)
    if not isinstance(offs, Tensor) or len(x.shape) != 2 or len(w.shape) != 3:
        raise Unsupported("grouped product over other operands than [t, k], [e, k, n]")
    t, k, n, e = x.shape[0], x.shape[1], w.shape[2], w.shape[0]
    iters = [
        Iter(t, "o", whole(t, 0), ((0, whole(t, 0)),)),
        Iter(n, "p", whole(n, 1), ((1, whole(n, 2)),)),
        Iter(e, "o", (), ((1, whole(e, 0)), (2, whole(e, 0)))),
        Iter(k, "sum", (), ((0, whole(k, 1)), (1, whole(k, 1)))),
    ]
    return low.op("grouped_dot", "grouped_dot", [x, w, offs], iters, [t, n], node.dtype or x.dtype)


@lowers("aten.outer")
def outer(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return einsum(low, "i,j->ij", args[0], args[1], args[0].dtype)


def squeeze_keep(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """``shape`` with ``dims`` set to 1 (keepdim)."""
    return [1 if d in dims else n for d, n in enumerate(shape)]
