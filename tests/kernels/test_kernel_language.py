"""The language of kernel definitions: what is read, what is refused, and that nothing of a file is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emerge.kernels.interpret import NotApplicable, evaluate
from emerge.kernels.registry import definitions
from emerge.kernels.syntax import Definition, read_definitions
from emerge.util.errors import RuleError

torch = pytest.importorskip("torch")

HEAD = '@operator("mylib.f.default")\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "f.kernel"
    path.write_text(text)
    return path


def define(tmp_path: Path, body: str, parameters: str = "x") -> Definition:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return read_definitions(write(tmp_path, f'{HEAD}def f({parameters}):\n    """meaning"""\n{lines}\n'))[0]


def run(definition: Definition, *args: Any, **kwargs: Any) -> Any:
    from emerge.execute.ops.defined import TorchTensors

    return evaluate(definition, TorchTensors(), args, kwargs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + 'def f(x):\n    """m"""\n    import os\n    return x\n', "Import is not in the language"),
        (HEAD + 'def f(x):\n    """m"""\n    while True:\n        pass\n    return x\n', "While is not in the language"),
        (HEAD + 'def f(x):\n    """m"""\n    return (lambda y: y)(x)\n', "Lambda is not in the language"),
        (HEAD + 'def f(x):\n    """m"""\n    return x.__class__\n', "do not start with '_'"),
        (HEAD + 'def f(x):\n    """m"""\n    return __import__("os")\n', "do not start with '_'"),
        (HEAD + 'def f(*x):\n    """m"""\n    return x\n', "parameters are names"),
        (HEAD + 'def f(x):\n    """m"""\n    y = x\n', "returns nothing"),
        (HEAD + "def f(x):\n    return x\n", "no docstring"),
        ('@operator("f")\ndef f(x):\n    """m"""\n    return x\n', "qualified operator name"),
        ('@cached\ndef f(x):\n    """m"""\n    return x\n', "expected @operator"),
        (HEAD + '@example(y=tensor(2))\ndef f(x):\n    """m"""\n    return x\n', "@example takes parameters of f"),
        (HEAD + '@writes("y")\ndef f(x):\n    """m"""\n    return x\n', "is no parameter"),
        ("x = 3\n", "function definitions only"),
        ("def f(x:\n", "correct the file"),
    ],
)
def test_a_file_outside_the_language_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RuleError) as error:
        read_definitions(path)
    assert message in error.value.message
    assert str(path) in str(error.value)


def test_arithmetic_shapes_and_control(tmp_path: Path) -> None:
    body = (
        "n = x.shape[-1] // 2\nparts = [x[..., k * n : (k + 1) * n] for k in range(2)]\n"
        "out = 0\nfor p in parts:\n    out = out + p * scale\n"
        "if bias is not None:\n    out = out + bias\nassert n > 1, 'more than one element per part'\nreturn out.transpose(0, 1)"
    )
    f = define(tmp_path, body, "x, scale=2, bias=None")
    x, bias = torch.randn(3, 8, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    expected = (x[:, :4] + x[:, 4:]) * 2 + bias
    assert torch.allclose(run(f, x, bias=bias), expected.t())
    with pytest.raises(NotApplicable, match="more than one element per part"):
        run(f, x[:, :2])
    with pytest.raises(NotApplicable, match="no parameter 'other'"):
        run(f, x, other=1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if x > 0:\n    return x\nreturn x", "depends on the values of a tensor"),
        ("return open('f')", "no function open"),
        ("return unknown", "has no value"),
        ("return x.data", "no attribute 'data'"),
        ("return 10 ** 1000", "powers"),
        ("return [0] * 100000000", "small number of times"),
        ("y = x\nfor i in range(100000000):\n    y = y\nreturn y", "range"),
        ("return f(x)", "deeper"),
        ("x[0] = 1\nreturn x", "only names are assigned"),
        ("return x @ x", "matmul"),
    ],
)
def test_what_does_not_apply_is_a_reason(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(NotApplicable, match=message):
        run(define(tmp_path, body), torch.randn(2, 3))


def test_a_change_of_a_helper_changes_the_digest_and_a_comment_does_not(tmp_path: Path) -> None:
    def digest(helper: str, comment: str = "") -> str:
        text = f'def h(x):\n    {comment}\n    return {helper}\n\n\n{HEAD}def f(x):\n    """m"""\n    return h(x)\n'
        return read_definitions(write(tmp_path, text))[0].hash

    assert digest("x + 1") != digest("x + 2")
    assert digest("x + 1") == digest("x + 1", "# a comment")


def test_an_operator_is_defined_in_one_file_only(tmp_path: Path) -> None:
    text = HEAD + 'def f(x):\n    """m"""\n    return x\n'
    (tmp_path / "a.kernel").write_text(text)
    (tmp_path / "b.kernel").write_text(text)
    with pytest.raises(RuleError, match="already defined"):
        definitions([tmp_path])
    (tmp_path / "b.kernel").write_text(text.replace("mylib.f.default", "aten.rms_norm.default"))
    with pytest.raises(RuleError, match="defined by Emerge"):
        definitions([tmp_path])
