"""What every command needs from the machine: flags, files, output, signals, locks and downloads."""
