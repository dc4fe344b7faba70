"""What `polyamp.parity.plugin` needs in a session of pytest that uses it: which test belongs to which backend
(`choice`), the processes of the frameworks (`standing_in`, `processes`, `child`), and the assertion (`asserting`)."""
