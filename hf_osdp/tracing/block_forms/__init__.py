"""Run blocks in the forms of `planner/block_forms.py`. The rest of the package asks only the names of this file, which
is the list of forms.
"""

from .compiled import change_blocks
from .traced import FormError, forms_asked, forms_in_trace, policies_of_form, trace_in_forms

__all__ = ["FormError", "change_blocks", "forms_asked", "forms_in_trace", "policies_of_form", "trace_in_forms"]
