// A page is held without any edit behind it.
use flush::*;
use misuse::*;
use std::marker::PhantomData;

fn main() {
    let mut batch: Batch<Page, 32> = Batch::new(DomainId::new(1));
    let _ = batch.hold(|_| Ok::<_, ()>((Page(Mfn::new(7)), Cleared { brand: PhantomData })));
}
