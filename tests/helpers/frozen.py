"""Imported last by the process whose forks ranks are: else each rank's first collections go through all that was
imported before, and copy its pages.
"""

import gc

gc.collect()
gc.freeze()
