"""Static checks: everything that would make an engine fail, or make the two engines differ, is refused here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from emerge.engine.lower import Assign, Rule, Step
from emerge.engine.syntax import (
    INT_MIN,
    Agg,
    Atom,
    Body,
    Clause,
    Cmp,
    Literal,
    Neg,
    Num,
    Op,
    Pos,
    Rec,
    RelationDecl,
    SourceClause,
    Term,
    Var,
    Wild,
    literal_terms,
    subterms,
    variables,
)
from emerge.util.errors import RuleError

# The Soufflé interpreter has no relations beyond this.
MAX_COLUMNS = 22


def check_declaration(decl: RelationDecl) -> None:
    """Raises RuleError for a relation no engine could store."""
    if decl.arity > MAX_COLUMNS:
        raise RuleError(
            f"the relation '{decl.name}' has {decl.arity} columns, engines take at most {MAX_COLUMNS}; use a record",
            str(decl.pos),
        )
    if decl.name.startswith("log__"):
        raise RuleError(f"the relation name '{decl.name}' is kept for derivation logs; use another", str(decl.pos))
    repeated = [name for name, count in Counter(n for n, _ in decl.columns).items() if count > 1]
    if repeated:
        raise RuleError(f"the relation '{decl.name}' has two columns named '{repeated[0]}'", str(decl.pos))


def check_atoms(atoms: Iterable[Atom], relations: Mapping[str, RelationDecl]) -> None:
    """Raises RuleError for an undeclared relation or a wrong number of arguments."""
    for atom in atoms:
        decl = relations.get(atom.name)
        if decl is None:
            raise RuleError(_undeclared(atom.name, relations), str(atom.pos))
        if len(atom.args) != decl.arity:
            raise RuleError(
                f"'{atom.name}' has {decl.arity} columns (declared at {decl.pos}), found {len(atom.args)} arguments",
                str(atom.pos),
            )


def clause_atoms(clause: Clause) -> Iterable[Atom]:
    """Every atom of a clause: head, positive, negated, inside aggregates."""
    yield clause.head
    yield from _atoms(clause.body)
    yield from (a for arg in clause.head.args for a in _aggregate_atoms(arg))


def _atoms(literals: Iterable[Literal]) -> Iterable[Atom]:
    for literal in literals:
        if isinstance(literal, Atom):
            yield literal
        elif isinstance(literal, Neg):
            yield literal.atom
        for term in literal_terms(literal):
            yield from _aggregate_atoms(term)


def _aggregate_atoms(term: Term) -> Iterable[Atom]:
    for sub in subterms(term):
        if isinstance(sub, Agg):
            yield from _atoms(sub.body)


def _undeclared(name: str, relations: Mapping[str, RelationDecl]) -> str:
    close = get_close_matches(name, relations, 1)
    hint = f"; did you mean '{close[0]}'?" if close else "; add a .decl"
    return f"the relation '{name}' is not declared{hint}"


def source_literals(body: Body) -> Iterable[Literal]:
    """All literals of a body as written, in order."""
    for choice in body.choices:
        for item in choice:
            if isinstance(item, Body):
                yield from source_literals(item)
            else:
                yield item


def check_singletons(clause: SourceClause) -> None:
    """Raises RuleError for a variable that occurs once and does not start with ``_``: most likely misspelt."""
    places: dict[str, list[Pos]] = {}
    terms = [t for head in clause.heads for t in head.args]
    for literal in source_literals(clause.body):
        terms += literal_terms(literal)
    for term in terms:
        for var in variables(term, into_aggregates=True):
            places.setdefault(var.name, []).append(var.pos)
    for name, found in places.items():
        if len(found) == 1 and not name.startswith("_"):
            raise RuleError(
                f"the variable '{name}' occurs only once; correct its name, or write '_' or '_{name}'", str(found[0])
            )


# --- grounding ------------------------------------------------------------------------------------------------------


def check_grounded(rule: Rule) -> None:
    """Raises RuleError for a variable that no positive atom (or equation with ground sides) binds."""
    ground = _closure(rule.body, set())
    for step in rule.body:
        if isinstance(step, Assign):
            for name in sorted(step.shared - ground):
                raise RuleError(
                    f"the variable '{name}' of the aggregate is used outside it but bound only inside; "
                    "bind it in a positive atom outside",
                    str(step.agg.pos),
                )
            inner = _closure(step.agg.body, set(step.shared), records_bind=False)
            unpacked = _closure(step.agg.body, set(step.shared)) - inner
            if unpacked:
                raise RuleError(
                    "a record is taken apart inside an aggregate, which Soufflé cannot do; take it apart in a clause "
                    "of its own and aggregate over its head",
                    str(step.agg.pos),
                )
            _require_ground(step.agg.body, inner, step.agg.target)
    _require_ground(rule.body, ground, *rule.head.args)


def _require_ground(steps: Sequence[Step], ground: set[str], *more: Term | None) -> None:
    terms = [t for s in steps if not isinstance(s, Assign) for t in literal_terms(s)]
    for term in (*terms, *more):
        for var in variables(term) if term is not None else ():
            if var.name not in ground:
                name = var.name.split("@")[0]
                raise RuleError(
                    f"the variable '{name}' is not bound; use it in a positive atom of the same body", str(var.pos)
                )


def _closure(steps: Sequence[Step], ground: set[str], records_bind: bool = True) -> set[str]:
    """Variables bound by ``steps`` when those of ``ground`` are bound already."""
    for step in steps:
        if isinstance(step, Atom):
            ground.update(v.name for a in step.args if records_bind or isinstance(a, Var) for v in variables(a))
    changed = True
    while changed:
        before = len(ground)
        for step in steps:
            if isinstance(step, Assign) and step.shared <= ground:
                ground.add(step.var.name)
            elif isinstance(step, Cmp) and step.op == "=":
                for one, other in ((step.left, step.right), (step.right, step.left)):
                    if not isinstance(one, (Var, Rec) if records_bind else Var):
                        continue
                    if all(v.name in ground for v in variables(other)) and not _has_wild(other):
                        ground.update(v.name for v in variables(one))
        changed = len(ground) != before
    return ground


def _has_wild(term: Term) -> bool:
    return any(isinstance(t, Wild) for t in subterms(term))


# --- division -------------------------------------------------------------------------------------------------------


def check_division(rule: Rule) -> None:
    """Raises RuleError unless every divisor is a literal other than 0 or a variable that the same body keeps off 0.

    Soufflé stops the whole run on a division by zero; the embedded engine would drop the tuple.
    """
    _check_divisions(rule.body)
    for step in rule.body:
        if isinstance(step, Assign):
            _check_divisions(step.agg.body, step.agg.target)


def _check_divisions(steps: Sequence[Step], target: Term | None = None) -> None:
    comparisons = [s for s in steps if isinstance(s, Cmp)]
    terms = [t for c in comparisons for t in (c.left, c.right)] + ([] if target is None else [target])
    for term in terms:
        for sub in subterms(term):
            if not (isinstance(sub, Op) and sub.op in ("/", "%")):
                continue
            divisor = sub.args[1]
            if isinstance(divisor, Num) and divisor.value != 0:
                continue
            if isinstance(divisor, Var) and guard_of(divisor.name, comparisons):
                continue
            raise RuleError(
                "the divisor may be 0, which ends the run; divide by a literal other than 0, or by a variable with a "
                "guard such as 'x != 0' or 'x > 0' in the same body",
                str(sub.pos),
            )


def guard_of(name: str, steps: Iterable[Step]) -> str:
    """How comparisons keep a variable off 0: ``positive``, ``nonzero``, or "" when they do not."""
    result = ""
    for step in steps:
        if not isinstance(step, Cmp):
            continue
        op, left, right = step.op, step.left, step.right
        if isinstance(right, Var) and isinstance(left, Num):
            left, right, op = right, left, {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(op, op)
        if not (isinstance(left, Var) and left.name == name and isinstance(right, Num)):
            continue
        bound = right.value
        if (op == ">" and bound >= 0) or (op == ">=" and bound >= 1) or (op == "=" and bound >= 1):
            return "positive"
        negative = (op == "<" and bound <= 0) or (op == "<=" and bound <= -1) or (op == "=" and bound < 0)
        if negative or (op == "!=" and bound == 0):
            result = "nonzero"
    return result


def may_overflow_division(op: Op) -> bool:
    """Whether a division could be the lowest number by -1, which both engines' processors trap."""
    divisor = op.args[1]
    if isinstance(divisor, Num):
        dividend = op.args[0]
        return divisor.value == -1 and not (isinstance(dividend, Num) and dividend.value != INT_MIN)
    return True


# --- stratification -------------------------------------------------------------------------------------------------


def dependencies(rules: Iterable[Rule]) -> tuple[dict[str, set[str]], dict[tuple[str, str], Pos]]:
    """Positive body relations of every head, and (head, relation) pairs that must lie in a lower stratum."""
    positive: dict[str, set[str]] = {}
    below: dict[tuple[str, str], Pos] = {}
    for rule in rules:
        head = rule.head.name
        uses = positive.setdefault(head, set())
        for step in rule.body:
            match step:
                case Atom():
                    uses.add(step.name)
                case Neg():
                    below.setdefault((head, step.atom.name), step.pos)
                case Assign():
                    for literal in step.agg.body:
                        atom = literal.atom if isinstance(literal, Neg) else literal
                        if isinstance(atom, Atom):
                            below.setdefault((head, atom.name), atom.pos)
                case _:
                    pass
    return positive, below


def check_stratified(rules: Iterable[Rule]) -> None:
    """Raises RuleError when a relation depends on its own negation or on an aggregate over itself."""
    positive, below = dependencies(rules)
    edges: dict[str, set[str]] = {head: set(uses) for head, uses in positive.items()}
    for head, name in below:
        edges.setdefault(head, set()).add(name)
    component = strong_components(edges)
    for (head, name), pos in below.items():
        if head in component and component.get(name) == component[head]:
            path = " -> ".join([head, *_path(edges, name, head)])
            raise RuleError(
                f"'{head}' depends on its own negation or on an aggregate over itself ({path}); "
                "negate only relations that are computed before",
                str(pos),
            )


def _path(edges: Mapping[str, set[str]], start: str, goal: str) -> list[str]:
    came: dict[str, str] = {start: ""}
    queue = [start]
    for node in queue:
        for successor in sorted(edges.get(node, ())):
            if successor not in came:
                came[successor] = node
                queue.append(successor)
    path, node = [goal], goal
    while node != start:
        node = came[node]
        path.append(node)
    return path[::-1]


def strong_components(edges: Mapping[str, set[str]]) -> dict[str, int]:
    """Number of the strongly connected component of every node (Tarjan, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    component: dict[str, int] = {}
    stack: list[str] = []
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(sorted(edges.get(root, ()))))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, successors = work[-1]
            for successor in successors:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    stack.append(successor)
                    work.append((successor, iter(sorted(edges.get(successor, ())))))
                    break
                if successor not in component:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    number = len(component)
                    while True:
                        member = stack.pop()
                        component[member] = number
                        if member == node:
                            break
    return component
