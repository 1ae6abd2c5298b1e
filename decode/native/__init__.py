"""Our own forward for the Llama family: a static cache, few operations, rows free of each other."""
