"""Run blocks in the forms of `planner/block_forms.py`. The rest of the package asks only the names of this file, which
is the list of forms.
"""

from .compiled import compile_blocks as change_blocks
from .traced import NotCompiledError as FormError
from .traced import budgets_of as policies_of_form
from .traced import compiled_if_asked as forms_asked
from .traced import compiler_in_trace as forms_in_trace
from .traced import trace_compiled as trace_in_forms

__all__ = ["FormError", "change_blocks", "forms_asked", "forms_in_trace", "policies_of_form", "trace_in_forms"]
