"""The coordination backends, one file each; imported as ``dprims.backends``.

A backend is found by the scheme of its URL through the entry-point group ``dprims.backends``;
:func:`dprims.connect` loads it, and nothing here is imported before that.
"""

from __future__ import annotations

if __name__ != "dprims.backends":  # a second copy would hold classes that are not the same
    raise ImportError(f"import this package as dprims.backends, not as {__name__}")
