"""Python imports this at its start: an engine's process then has the stub for its engine."""

import sys

if "jpaged.serve.worker" in sys.orig_argv:
    import stub_engine

    import jpaged

    jpaged.Engine = stub_engine.StubEngine
