"""A model as transformers has it: built, filled, probed and compared with itself.

Only here is transformers' modelling code imported. That takes seconds, and a start that finds what
an earlier one kept does without.
"""
