"""For tests of code that uses dprims, and of new backends: real servers, faults, and a conformance suite.

Each part is a module of its own and is imported by its name; nothing here is imported by the rest.
"""
