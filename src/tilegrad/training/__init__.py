"""A run around the engine: data → step → log → evaluation → checkpoint → report. `tilegrad.train` starts one."""
