"""Runs the notebooks and stores their outputs.

    python -m tools.notebooks

Every notebook runs in an empty folder. Times of cells are not stored.
"""

import pathlib
import tempfile

import nbclient
import nbformat

for path in sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb")):
  notebook = nbformat.read(path, 4)
  with tempfile.TemporaryDirectory() as folder:
    nbclient.NotebookClient(
      notebook, timeout=900, resources={"metadata": {"path": folder}}
    ).execute()
  for cell in notebook.cells:
    cell.metadata.pop("execution", None)
  nbformat.write(notebook, path)
  print(path.name)
