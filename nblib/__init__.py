"""nblib: the mechanisms behind the notebooks, one idea per file. Read the files in the order of the README's map."""

from nblib.workbook.check import check as check  # light: neither torch nor papermill

__version__ = "0.1.0"
