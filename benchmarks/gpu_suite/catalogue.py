"""Import all steps, the most informative first; importing a module registers its steps."""

from . import one_rank  # noqa: F401, I001
from . import attention  # noqa: F401
from . import training  # noqa: F401
from . import several_ranks  # noqa: F401
from . import faults  # noqa: F401
from . import offload  # noqa: F401
from . import memory  # noqa: F401
from . import times  # noqa: F401
from . import beside  # noqa: F401
from . import headlines  # noqa: F401
