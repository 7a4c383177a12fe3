"""Every exception Emerge raises on purpose.

Each carries one sentence for a person: the place, what was expected, what was found, what to do.
"""

from __future__ import annotations


class EmergeError(Exception):
    """Base of all errors that are reported as one sentence, without a traceback.

    Args:
        message: one sentence: expected, found, and what to do about it.
        place: where it was found, e.g. ``rank1.json: node 'mm_3'`` or ``case.yaml:12`` ("" when there is none).
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"{place}: {message}" if place else message)
        self.message = message
        self.place = place


class InputError(EmergeError):
    """A graph, relation, config or command-line input is malformed or contradicts itself (exit status 2).

    It says nothing about the equivalence of the pair.
    """


class GraphError(InputError):
    """A graph file is malformed: truncated, dangling or cyclic reference, shape that contradicts its operator."""


class RelationError(InputError):
    """Input or output relations are malformed, impossible for the shapes, or contradict each other."""


class ConfigError(InputError):
    """A campaign file has an unknown key, a value of the wrong kind, or names something that does not exist."""


class RuleError(InputError):
    """A rule file is malformed, outside the Datalog subset, or holds a law that was refused (exit status 2)."""


class EngineError(EmergeError):
    """A Datalog engine failed to run (missing binary, crash, exceeded budget); the program itself was accepted."""


class BudgetExceeded(EmergeError):
    """A limit on time, memory or size was reached; the verdict of the pair is UNKNOWN with this reason."""


class ExecutionError(EmergeError):
    """A graph could not be executed: an operator without semantics, or sizes that do not fit the budget.

    Attributes:
        node: name of the node where execution stopped, "" when it is not one node.
    """

    def __init__(self, message: str, place: str = "", node: str = "") -> None:
        super().__init__(message, place)
        self.node = node
