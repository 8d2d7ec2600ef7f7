"""The training step: forward → loss → backward → reduce → clip → AdamW, in memory that is planned before the first one."""
