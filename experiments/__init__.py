"""The paper's experiments, one module per family: flags, config, the call, the table."""
