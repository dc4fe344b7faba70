"""Settings of the documentation site. `docs/site/build.py` prepares the pages and calls Sphinx with them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "site"))  # for the extension `text_links`

project = "polyamp"
author = "The polyamp authors"
project_copyright = author
release = version = re.findall(r'__version__ = "(.+)"', (ROOT / "polyamp" / "_version.py").read_text(encoding="utf-8"))[
    0
]

extensions = ["myst_parser", "sphinx_design", "sphinx_copybutton", "sphinx_llms_txt", "text_links"]
root_doc = "index"
source_suffix = {".md": "markdown"}
language = "en"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

add_module_names = False
python_display_short_literal_types = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"polyamp {release}"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_copy_source = True  # sphinx_llms_txt reads the copies
html_show_sourcelink = False
html_show_sphinx = False
html_show_search_summary = False  # the search would fetch pages, which a browser refuses for a site in files

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

llms_txt_summary = "One Policy and LossScaler API for mixed-precision training in PyTorch, TensorFlow/Keras and JAX."
llms_txt_uri_template = "_sources/{docname}{suffix}{sourcelink_suffix}"  # without an address: the site lies in files
