"""Whether answers are right: code by its tests, in a sandbox; final answers by comparison."""
