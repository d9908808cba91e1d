"""The optimiser of the parameter server: rules, the pass that applies them, schedules and parameter groups.

Must not know: protocols, clocks, processes. Beside the standard library, NumPy, and llvmlite where the host has it,
it reads the sizes of wire/compress.py.
"""
