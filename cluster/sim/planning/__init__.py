"""`kvrelay plan` with a trace: which devices, in which roles and degrees, hold an SLO for least.

`copies` are the ways to hold one copy of the model, `estimate` says by arithmetic what each could
serve, `candidates` orders the fleets worth a simulation, `settle` simulates them, in parallel.
"""
