"""Replace the engine by a stub in the engine's process. Python imports this module at its start."""

import sys

if "jpaged.serve.engine.worker" in sys.orig_argv:
    import stub_engine

    import jpaged

    jpaged.Engine = stub_engine.StubEngine
