"""Systems, a file each: settings as a reader of the paper or write-up would list them."""
