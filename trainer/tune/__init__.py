"""`wmse tune`: check and time the choices that change the speed and not the result, on the device at hand."""
