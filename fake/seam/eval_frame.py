"""torch's C++ frame evaluation, without Dynamo: a process that runs plans imports
nothing else that compiles."""

from torch._C._dynamo.eval_frame import (
    _debug_get_precompile_entries as entries_of,
    _FrameAction as FrameAction,
    _FrameExecStrategy as FrameExecStrategy,
    _load_precompile_entry as load_entry,
    get_eval_frame_callback as get_eval_frame_callback,
    reset_code as reset_code,
    set_code_exec_strategy as set_code_exec_strategy,
    set_eval_frame as set_eval_frame,
)
