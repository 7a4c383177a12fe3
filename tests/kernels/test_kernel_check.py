"""The check of definitions against real kernels, and what admission makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from emerge.kernels.registry import definitions
from emerge.kernels.syntax import Definition, read_definitions
from emerge.rules.kernels import admit_definitions, all_definitions, check_definition, read_shipped
from emerge.util.errors import RuleError

torch = pytest.importorskip("torch")

SHIPPED = all_definitions(definitions())


@pytest.mark.parametrize("definition", SHIPPED, ids=[d.name for d in SHIPPED])
def test_shipped_definitions_hold_and_their_results_are_kept(definition: Definition) -> None:
    found = check_definition(definition, seed=1)
    assert found.evidence != "refuted", found.reason
    kept = read_shipped()[definition.name]
    assert kept.hash == definition.hash, "run emerge rules check --update"
    elsewhere = "aten._scaled_dot_product_flash_attention.", "aten._scaled_dot_product_efficient"
    if definition.operator.startswith("aten.") and not definition.operator.startswith(elsewhere):
        assert kept.evidence == "tested"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("norms", "mean(x * x, [k - n for k in range(n)], True) + eps)", "mean(x * x, [k - n for k in range(n)], True)) + eps"),
        ("norms", "e / sum(e, [dim], True)", "e / sum(e, [0], True)"),
        ("norms", "rstd = rsqrt(mean(centred * centred, dims, True) + eps)", "rstd = rsqrt(mean(x * x, dims, True) + eps)"),
        ("attention", "1 / sqrt(q.shape[-1])", "1 / q.shape[-1]"),
        ("attention", "return j <= i\n", "return j < i + 2\n"),
        ("attention", "where(mask, scores, -inf)", "where(mask, -inf, scores)"),
        ("activations", "0.044715", "0.044"),
    ],
)  # fmt: skip
def test_a_wrong_definition_is_refuted(tmp_path: Path, file: str, old: str, new: str) -> None:
    source = next(d.place for d in SHIPPED if d.place.rpartition("/")[2].startswith(file)).rpartition(":")[0]
    text = Path(source).read_text()
    assert text.count(old) >= 1
    path = tmp_path / f"{file}.kernel"
    path.write_text(text.replace(old, new))
    refuted = [d.name for d in read_definitions(path) if check_definition(d).evidence == "refuted"]
    assert refuted


def test_kernels_with_an_executor_of_their_own_agree_with_their_definitions() -> None:
    """Kernels of vLLM that this installation executes by hand-written functions."""
    from emerge.execute.ops.base import Call
    from emerge.execute.ops.kernels import run_in_place
    from emerge.execute.options import Options
    from emerge.graph.model import Node
    from emerge.kernels.interpret import evaluate
    from emerge.rules.kernels import _backend, _copied, _difference, _Examples, _results

    options, count = Options(), 0
    for definition in SHIPPED:
        for number, example in enumerate(definition.examples if definition.operator.startswith("_C.") else ()):
            given = _Examples(number, 1.0).arguments(example)
            call = Call(
                Node("call", definition.operator, [], {}), [], {}, options, options.torch_device(), False, {}, 0, "test"
            )
            expected = run_in_place(call, definition.operator.rpartition(".")[0], _copied(given))
            made = _results(evaluate(definition, _backend(), [], _copied(given)))
            assert _difference(made, expected) == "", definition.name
            count += 1
    assert count >= 6


def test_a_definition_that_nothing_tests_here_is_assumed_and_a_false_one_refused(tmp_path: Path) -> None:
    text = '@operator("nolib.twice.default")\n@example(x=tensor(3, 5))\ndef twice(x):\n    """double"""\n    return 2 * x\n'
    path = tmp_path / "twice.kernel"
    path.write_text(text)
    assert admit_definitions({"nolib.twice.default": read_definitions(path)}) == {"nolib.twice.default:twice": "assumed"}
    path.write_text(text.replace("nolib.twice.default", "aten.square.default").replace("(x", "(self").replace("* x", "* self"))
    with pytest.raises(RuleError, match=r"'aten.square.default:twice' is refused: result 0 differs"):
        admit_definitions({"aten.square.default": read_definitions(path)})


def test_a_shipped_definition_that_changed_is_refused_by_name(tmp_path: Path) -> None:
    source = next(Path(d.place.rpartition(":")[0]) for d in SHIPPED if "/attention" in d.place)
    path = tmp_path / source.name
    path.write_text(source.read_text().replace("1 / sqrt(", "1.0 / sqrt("))
    changed = [d for d in read_definitions(path, shipped=True) if d.hash not in {s.hash for s in SHIPPED}]
    assert changed
    with pytest.raises(RuleError, match=f"shipped definition '{changed[0].name}' has changed since it was checked"):
        admit_definitions({d.operator: [d] for d in changed})
