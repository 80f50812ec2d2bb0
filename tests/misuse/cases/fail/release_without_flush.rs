// A guest page is given back with no flush at all.
use flush::*;
use misuse::*;

fn main() {
    give_back(Page(Mfn::new(7)));
}
