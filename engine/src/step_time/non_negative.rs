//! Non-negative least squares over a small normal matrix.
//!
//! Exact up to rounding, in a bounded number of steps. Coordinate descent is simpler but
//! slow to settle where two terms always come together, as attention and KV do in decode.
//!
//! *Source*: Lawson, Hanson, "Solving Least Squares Problems", 1974, chapter 23.

use super::{TERMS, Terms, dot};

/// The `x >= 0` that minimises `x' gram x / 2 - moment' x`. `gram` is symmetric and
/// positive definite; all numbers are finite.
pub(super) fn solve(gram: &[Terms; TERMS], moment: &Terms) -> Terms {
    let mut x = [0.0; TERMS];
    let mut free = [false; TERMS];
    // Each round frees one coordinate for good or sees it bound again; the theory bounds
    // the rounds, the limit covers rounding.
    for _ in 0..3 * TERMS {
        let slope = |i: usize| moment[i] - dot(&gram[i], &x);
        let steepest = (0..TERMS)
            .filter(|i| !free[*i])
            .max_by(|a, b| slope(*a).total_cmp(&slope(*b)));
        match steepest {
            Some(i) if slope(i) > 1e-12 * moment[i].abs() => free[i] = true,
            _ => break,
        }
        settle(gram, moment, &mut x, &mut free);
    }
    x
}

/// Moves `x` to the best point of its free coordinates, binding those that would turn
/// negative on the way.
fn settle(gram: &[Terms; TERMS], moment: &Terms, x: &mut Terms, free: &mut [bool; TERMS]) {
    while free.contains(&true) {
        let target = unconstrained(gram, moment, free);
        // The one that would turn negative first, and after which share of the way.
        let first = (0..TERMS)
            .filter(|i| free[*i] && target[*i] <= 0.0)
            .map(|i| (i, x[i] / (x[i] - target[i]).max(f64::MIN_POSITIVE)))
            .min_by(|a, b| a.1.total_cmp(&b.1));
        let Some((bound, share)) = first else {
            *x = target;
            return;
        };
        for (x, target) in x.iter_mut().zip(target) {
            *x = (*x + share * (target - *x)).max(0.0);
        }
        x[bound] = 0.0;
        free[bound] = false;
    }
}

/// Solves the free coordinates by Cholesky factors; bound ones are 0.
fn unconstrained(gram: &[Terms; TERMS], moment: &Terms, free: &[bool; TERMS]) -> Terms {
    let (mut factor, mut x) = ([[0.0; TERMS]; TERMS], [0.0; TERMS]);
    let indices = || (0..TERMS).filter(|i| free[*i]);
    for i in indices() {
        for j in indices().take_while(|j| *j <= i) {
            let known: f64 = (0..j).map(|k| factor[i][k] * factor[j][k]).sum();
            factor[i][j] = if i == j {
                // Positive but for rounding.
                (gram[i][i] - known).max(1e-15 * gram[i][i]).sqrt()
            } else {
                (gram[i][j] - known) / factor[j][j]
            };
        }
        let known: f64 = (0..i).map(|k| factor[i][k] * x[k]).sum();
        x[i] = (moment[i] - known) / factor[i][i];
    }
    for i in (0..TERMS).rev().filter(|i| free[*i]) {
        let known: f64 = (i + 1..TERMS).map(|k| factor[k][i] * x[k]).sum();
        x[i] = (x[i] - known) / factor[i][i];
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A positive definite matrix of fixed odd numbers.
    fn gram() -> [Terms; TERMS] {
        let rows: [Terms; TERMS] =
            std::array::from_fn(|i| std::array::from_fn(|j| ((i * 7 + j * 5) % 11) as f64));
        std::array::from_fn(|i| {
            std::array::from_fn(|j| dot(&rows[i], &rows[j]) + if i == j { 0.5 } else { 0.0 })
        })
    }

    #[test]
    fn a_solution_without_negatives_is_found_exactly() {
        let wanted: Terms = std::array::from_fn(|i| 0.5 + i as f64);
        let moment = gram().map(|row| dot(&row, &wanted));
        for (x, wanted) in solve(&gram(), &moment).iter().zip(wanted) {
            assert!((x - wanted).abs() < 1e-9, "{x} is not {wanted}");
        }
    }

    #[test]
    fn at_a_bound_the_slope_points_outwards() {
        for seed in 0..200_usize {
            let moment: Terms =
                std::array::from_fn(|i| ((seed * 31 + i * 17 + seed * i) % 41) as f64 - 20.0);
            let gram = gram();
            let x = solve(&gram, &moment);
            for i in 0..TERMS {
                let slope = moment[i] - dot(&gram[i], &x);
                assert!(x[i] >= 0.0, "{x:?}");
                assert!(slope < 1e-8, "{seed}: {slope} at {i} of {x:?}");
                assert!(
                    x[i] == 0.0 || slope > -1e-8,
                    "{seed}: {slope} at {i} of {x:?}"
                );
            }
        }
    }
}
