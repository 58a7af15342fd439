"""Imported last of all: what is there by then garbage collectors leave alone, in this process and in those forked off it.

Looking through torch takes half a second each time, and copies every page of it in a forked process. At the interpreter's
end it is looked through again: triton complains of what is left.
"""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)
