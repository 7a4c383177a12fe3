"""The algebra: equality saturation over the lowered tensors of one side, with the rules of ``rules/*.egg``.

``encode`` writes every tensor as a term, ``saturate`` runs the rules within a budget, ``extend`` reads the classes of equal
terms back as further tensors and writes ``same`` facts. Nothing about values is decided here: what is equal is said by the
rule files, which are certified like laws.
"""
