// The proof of a flush is made by hand.
use flush::*;
use misuse::*;

fn main() {
    give_back(Released(Page(Mfn::new(7))));
}
