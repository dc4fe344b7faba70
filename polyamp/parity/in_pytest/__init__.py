"""Implementation of the pytest plugin: backend selection (`backend_selection`), processes of the frameworks
(`remote_items`, `framework_processes`, `child_session`), and the assertion (`assert_parity`)."""
