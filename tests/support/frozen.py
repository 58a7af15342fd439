"""Imported last by a server that forks: garbage collectors leave alone what was imported, whose pages they would copy."""

import gc

gc.collect()
gc.freeze()
