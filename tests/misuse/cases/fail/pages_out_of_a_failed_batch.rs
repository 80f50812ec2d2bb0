// A page is taken out of a batch whose flush failed.
use flush::*;
use misuse::*;

fn main() {
    let mut batch: Batch<Page, 4> = Batch::new(DomainId::new(1));
    if let Err(mut failure) = batch.flush(&Hardware { tlb: &Idle, iotlb: &Idle }) {
        while let Some(page) = failure.held.next_page() {
            give_back(page);
        }
    }
}
