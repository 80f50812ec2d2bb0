// A proof is copied.
use flush::*;
use misuse::*;

fn twice(page: Released<Page>) {
    give_back(page.clone());
    give_back(page);
}

fn main() {
    let _: fn(Released<Page>) = twice;
}
