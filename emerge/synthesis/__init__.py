"""Rule synthesis: where a proof lacks an equality, executed values propose one, and the certifier decides whether it is a rule.

``values`` executes both sides, ``api`` pairs tensors with the same values, ``generalise`` cuts out the terms between
them and the tensors that are aligned already and writes a rewrite. ``places`` finds neighbouring operators behind tensors with
the same numbers, ``exchange`` how they change places (``sketches``: what may stand there, ``ground``: what decides).
``implied`` says which rules follow from others, ``store`` keeps rules with their certificates.
Nothing synthesised is used before it passed what every rule of ``rules/*.egg`` passes.
"""
