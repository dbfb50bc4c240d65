"""Replace the engine with a stub in the engine process; Python imports this module at startup."""

import sys

if "jpaged.serve.engine.worker" in sys.orig_argv:
    import stub_engine

    import jpaged

    jpaged.Engine = stub_engine.StubEngine
