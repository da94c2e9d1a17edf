//! How much of a bounded queue one tenant may fill.
//!
//! Dynamic thresholds: a tenant may hold up to [`SHARE`] times what is still free. Alone it
//! gets four fifths of a queue, two that push as hard as they can get four ninths each, and
//! there is always room for one that has nothing in it yet. Whoever pushes most is refused
//! first, and nothing has to be known of who else may come.

/// Times the free room that one tenant may hold.
const SHARE: u64 = 4;

/// Whether a tenant that holds `own` of the `held` places of a queue with `max` may have
/// `more`. Whether they are free at all is another question.
pub fn may_hold(own: u64, more: u64, held: u64, max: u64) -> bool {
    let free = max.saturating_sub(held);
    own == 0 || own.saturating_add(more) <= free.saturating_mul(SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places each of `tenants` gets when all push, one place a turn, until nobody may.
    fn filled(max: u64, tenants: usize) -> Vec<u64> {
        let mut own = vec![0; tenants];
        loop {
            let mut any = false;
            for tenant in 0..tenants {
                let held: u64 = own.iter().sum();
                if held < max && may_hold(own[tenant], 1, held, max) {
                    own[tenant] += 1;
                    any = true;
                }
            }
            if !any {
                return own;
            }
        }
    }

    #[test]
    fn who_pushes_gets_much_and_leaves_room() {
        assert_eq!(filled(1000, 1), [800]);
        let two = filled(900, 2);
        assert!(two.iter().all(|own| (396..=402).contains(own)), "{two:?}");
        for tenants in 1..20 {
            let held: u64 = filled(1000, tenants).iter().sum();
            assert!(held < 1000 && may_hold(0, 1, held, 1000));
        }
    }

    #[test]
    fn a_small_queue_is_not_wasted() {
        assert_eq!(filled(1, 1), [1]);
        assert_eq!(filled(4, 1), [4]);
        assert_eq!(filled(8, 1), [7]);
    }
}
