"""``vkattn bench``: what attention costs on a device, beside what it could cost and what others take."""
