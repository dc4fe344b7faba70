"""Pages and pictures of reports: the page as data, its charts, and its HTML and PNG form."""
