// Two records are exchanged in mid-edit.
use flush::*;
use misuse::*;

fn main() {
    let domain = DomainId::new(1);
    let mut one: Batch<Page, 4> = Batch::new(domain);
    let mut other: Batch<Page, 4> = Batch::new(domain);
    one.edit_many(|first, _| other.edit_many(|second, _| std::mem::swap(first, second)));
}
